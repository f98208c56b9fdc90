"""Ready-made handlers, imported as `ignite_train.handlers`. Each is one file; none imports another."""

__all__: list[str] = []
