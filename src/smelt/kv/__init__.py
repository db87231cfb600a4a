"""Which keys and values of a prompt are kept: scorers, budgets for layers and heads, and what they do to answers."""
