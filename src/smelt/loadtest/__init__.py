"""The load generator: requests to any OpenAI-compatible server at times drawn beforehand, and what they measured."""
