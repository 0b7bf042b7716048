"""Stand-ins of several layers."""


class Recorder:
    """Holds what it was sent, as an engine does. Fails before tensor number `fail_at` of the next load."""

    def __init__(self):
        self.weights = {}
        self.loads = []
        self.fail_at = None

    def load_weights(self, weights):
        names = []
        self.loads.append(names)
        for i, (name, tensor) in enumerate(weights):
            if i == self.fail_at:
                self.fail_at = None
                raise RuntimeError("engine broke")
            names.append(name)
            self.weights[name] = tensor.clone()


class Loads:
    """onload and offload that note the order of things."""

    def __init__(self):
        self.events = []

    def onload(self):
        self.events.append("onload")

    def offload(self):
        self.events.append("offload")
