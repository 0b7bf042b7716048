"""A worker extension: an engine whose weights look packed, on processors where vLLM does not pack them.

vLLM on the CPU packs weights where the processor's oneDNN can multiply them packed, which is not so for bfloat16 everywhere.
"""


class Packing:
    def compute_from_a_copy(self) -> None:
        """One layer gets the look of a packed one, if it has not got it from vLLM."""
        layer = self.model_runner.get_model().model.layers[0].self_attn.qkv_proj
        compute = layer.cpu_linear
        if not compute.__closure__:
            layer.cpu_linear = lambda x, weight, bias: compute(x, weight, bias)
            layer.cpu_linear_before = compute

    def compute_as_before(self) -> None:
        layer = self.model_runner.get_model().model.layers[0].self_attn.qkv_proj
        if (compute := layer.__dict__.pop("cpu_linear_before", None)) is not None:
            layer.cpu_linear = compute
