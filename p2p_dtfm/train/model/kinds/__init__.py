"""Kinds of layers that a run can list (`[[layers]]`).

`kind` says what a kind is, `registry` finds one by its name; `gpt_kinds` and `image_kinds` come
along. For `train.model.gpt`, which builds layers of both sorts of runs, and for whoever reads a run
spec.
"""
