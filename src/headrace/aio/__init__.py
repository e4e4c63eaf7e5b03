"""The client on asyncio: the same cores as the synchronous one, driven by the running loop."""
