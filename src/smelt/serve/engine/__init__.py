"""The engine: requests, blocks of the cache, the scheduler, the runner, and the loop around them."""
