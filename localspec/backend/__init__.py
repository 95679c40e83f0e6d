"""Running models: llama.cpp behind the `Context` protocol, and what can be read of a file without it."""
