"""The bounds of a step are measured on the products that the step computes."""

from benchmarks.graphs.kg_bounds import product_row, row_reads_row


def test_a_step_is_compared_with_what_it_cannot_avoid() -> None:
    row = product_row(entities=500, dim=8, steps=1, rounds=1)
    # The scores, and the gradients of queries and of candidates.
    assert "against their 3 products" in row.name
    assert row.ratio is not None
    assert row_reads_row(entities=500, dim=8, steps=1, rounds=1).ratio is not None
