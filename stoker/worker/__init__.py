"""An OpenAI server over one engine: HTTP and text in this process, the engine in another."""
