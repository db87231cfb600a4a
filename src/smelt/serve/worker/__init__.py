"""The engine in a process of its own: the loop that runs it, and the client that the server talks to it through."""
