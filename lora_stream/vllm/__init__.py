"""vLLM, the rollout engine. The only package that imports it.

llm.py        the engine of `lora_stream.sync`: a vllm.LLM in this process
plugin.py     the entry point that registers the `lora_stream` weight-transfer backend in every vLLM process
worker.py     that backend's worker side
transport.py  the seam between the two sides
manifest.py   what is checked before a weight is loaded
reload.py     the brackets around loading, and the way back out of them
"""
