"""A model's tensors by the names that a checkpoint has for them."""

from __future__ import annotations

from engine import registry
from engine.model import llama
from engine.parallel.shards import model_tensors
from lab import cli
from support.sharded_models import IDS

lesson, page = registry.lesson("05c_tensor_parallel"), cli.numbers("05c_tensor_parallel")


def test_model_tensors_are_the_weights(tiny_model):
    names = llama.tensor_shapes(tiny_model.config)
    lookup = model_tensors(tiny_model)
    assert all(tuple(lookup(name).shape) == shape for name, shape in names.items()) and lookup("nonsense") is None
    again = llama.Llama(tiny_model.config, lookup, tiny_model.dtype, tiny_model.device)
    assert lesson.all_logits(again, IDS).equal(lesson.all_logits(tiny_model, IDS))
