"""The OpenAI-compatible server: a front of asyncio in this process, the engine in another one.

`messages` is what crosses between them. `child` is the engine's process, `engine` the front's end
of it, `app` the HTTP paths, `server` what their routes share, `run` the command.
"""
