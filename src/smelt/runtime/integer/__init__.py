"""Integer-only networks: a graph of integer operators, its reference semantics and the interpreter that runs it."""
