"""Attention on a GPU that only ``--attention-backend fused`` chooses: whether a step is right does not depend on it."""

from __future__ import annotations

import pytest

from tests.nn.test_attention import check_documents_on_a_device


@pytest.mark.gpu
def test_documents_of_cudnn() -> None:
    check_documents_on_a_device("fused")
