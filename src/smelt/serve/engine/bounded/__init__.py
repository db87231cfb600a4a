"""The engine under a hard cap: a request's keys and values are a pot, cooked down when it is full (InfiniPot)."""
