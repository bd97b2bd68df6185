"""A contestant without a model, for the tests of the contest itself: its job's options say how it behaves."""

from benchmarks.worker import Built, serve


def build(job):
    options, state = job["options"], {"loss": 4.0}

    def step(tokens):
        if state["loss"] < options.get("dies_below", 0.0):
            raise RuntimeError("the fake fell over as told")
        state["loss"] -= options.get("learns", 0.1)
        return state["loss"]

    return Built(step, options["num_parameters"], {"fake": "1"})


if __name__ == "__main__":
    serve(build)
