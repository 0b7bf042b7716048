"""vLLM, the rollout engine. The only package that imports it.

In the trainer's process, importing no vLLM:
wire.py       a manifest as JSON
channel.py    one engine as its sender sees it: calls, and a ring to its workers
clients.py    what reaches an engine: a vllm.LLM, a server's routes, Ray actors
remote.py     the engine of `lora_stream.sync` in other processes

In vLLM's processes:
plugin.py     the entry point that registers the `lora_stream` weight-transfer backend
worker.py     that backend's worker side
manifest.py   what is checked before a weight is loaded
reload.py     the brackets around loading, and the way back out of them

Beside it:
llm.py        the engine of `lora_stream.sync` that is a vllm.LLM in this process
source.py     the stream as vLLM's WeightSource
trainer.py    the backend's trainer side, in vLLM's form
"""
