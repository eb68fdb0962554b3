import numpy as np
import pytest
import torch

from tests.model.cores import attend_with_maps, draw, row_context
from tests.model.test_taught_claims import attention_of


def test_pytorchs_function_equals_ours_and_returns_no_weights():
    attention = attention_of(4)
    q, k, v = (draw(1, 5, 4, 8, seed=seed) for seed in range(3))
    ours, _ = attend_with_maps(attention.core, q, k, v, row_context(attention.mask, 5))
    theirs = [torch.tensor(np.asarray(x)).swapaxes(1, 2) for x in (q, k, v)]
    attend = torch.nn.functional.scaled_dot_product_attention
    np.testing.assert_allclose(attend(*theirs, is_causal=True).swapaxes(1, 2), ours, atol=1e-5)
    for name in ("need_weights", "return_weights", "enable_flash"):
        with pytest.raises(TypeError, match=name):
            attend(*theirs, **{name: True})
