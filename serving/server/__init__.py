"""The OpenAI-compatible server: a front of asyncio in this process, the engine in another one.

`messages` is what crosses between them. `child` is the engine's process, `engine` the front's end
of it, `app` the HTTP routes, `run` the command.
"""
