"""What the installed Keras takes: read from its signatures, so that a new argument is noticed."""

import inspect
from collections.abc import Callable

import keras

# Not said by programs, or said by another row of the same name: each with its reason.
_LEFT_OUT = {"callbacks.OrbaxCheckpoint": "needs the package orbax-checkpoint"}
_BASES = {"metrics.Mean", "metrics.Sum"}  # what metrics of one's own and the loss are made of


def keras_names() -> set[str]:
    """`compile.loss`, `Embedding.mask_zero`, `Optimizer.clipnorm`, `losses.Dice`, ...: rows cover them."""
    model = keras.Model
    names = {
        *(f"Model.{name}" for name in _methods(model) - _PLUMBING),
        *(f"Embedding.{name}" for name in _methods(keras.layers.Embedding) - _methods(model) - _PLUMBING),
        *_arguments("compile", model.compile),
        *_arguments("fit", model.fit),
        *_arguments("evaluate", model.evaluate),
        *_arguments("predict", model.predict),
        *_arguments("Layer", keras.Layer.__init__),
        *_arguments("Embedding", keras.layers.Embedding.__init__),
        *_common_optimizer_arguments(),
        *(f"reduction.{reduction}" for reduction in _reductions()),
    }
    for kind in ("optimizers", "losses", "metrics", "callbacks"):
        names |= {f"{kind}.{name}" for name in _classes(getattr(keras, kind))}
    names |= {f"schedules.{name}" for name in _classes(keras.optimizers.schedules)} - {"schedules.LearningRateSchedule"}
    for name in _classes(keras.optimizers):
        own = _arguments(f"optimizers.{name}", getattr(keras.optimizers, name).__init__)
        names |= {key for key in own if key.rsplit(".")[-1] not in _COMMON and name not in _UNSUPPORTED_WHOLE}
    return names - set(_LEFT_OUT) - _BASES


# Methods that have rows under another name, or that programs override or call for Keras' own sake.
_PLUMBING = {
    *("compile", "fit", "evaluate", "predict", "add_metric", "add_variable", "add_weight", "from_config", "get_layer"),
    *("summary", "loss"),
    *("build", "build_from_config", "get_build_config", "get_compile_config", "compile_from_config"),
    *("compute_mask", "compute_output_shape", "compute_output_spec", "symbolic_call", "rematerialized_call"),
    *("get_metrics_result", "compiled_loss", "compiled_metrics", "load_own_variables", "save_own_variables"),
    *("make_predict_function", "make_test_function", "make_train_function", "distribute_reduction_method"),
    *("get_state_tree", "set_state_tree", "stateless_call", "stateless_compute_loss"),
    *("quantized_build", "quantized_call", "get_quantization_layer_structure", "variable_serialization_spec"),
}
_COMMON = {
    *("weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "use_ema", "ema_momentum"),
    *("ema_overwrite_frequency", "loss_scale_factor", "gradient_accumulation_steps", "name", "learning_rate"),
}
# One row refuses, or takes, all of their arguments alike.
_UNSUPPORTED_WHOLE = {"Muon", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap", "Optimizer"}


def _common_optimizer_arguments() -> set[str]:
    return {key for key in _arguments("Optimizer", keras.optimizers.SGD.__init__) if key.split(".")[1] in _COMMON}


def _arguments(prefix: str, function: Callable[..., object]) -> set[str]:
    skipped = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = inspect.signature(function).parameters.values()
    return {f"{prefix}.{each.name}" for each in parameters if each.name != "self" and each.kind not in skipped}


def _methods(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))}


def _classes(module: object) -> set[str]:
    return {name for name in dir(module) if name[0].isupper() and inspect.isclass(getattr(module, name))}


def _reductions() -> set[str]:
    """Those that the message for an unknown reduction lists."""
    try:
        keras.losses.MeanSquaredError(reduction="no such")
    except ValueError as error:
        return {
            name for name in ("sum", "sum_over_batch_size", "mean", "mean_with_sample_weight") if name in str(error)
        }
    raise AssertionError("Keras takes any reduction")
