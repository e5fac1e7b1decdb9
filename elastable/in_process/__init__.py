"""Training from this process: `et.fit`, `et.step`, `model.fit`; `fit_elsewhere`: on a cluster."""

__all__ = ["fit_elsewhere", "fitting", "tape_step"]
