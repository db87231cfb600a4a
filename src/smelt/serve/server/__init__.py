"""The OpenAI-compatible server in front of the engine. Needs the extra `serve`; nothing else in Smelt imports it."""
