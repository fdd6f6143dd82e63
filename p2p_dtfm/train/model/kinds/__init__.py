"""Kinds of layers that a run can list (`[[layers]]`).

`kind` says what a kind is; `registry` finds one by its name; `gpt_kinds` and `image_kinds` are
built in. `train.model.gpt` needs them to build layers of both sorts of runs, and so does whoever
reads a run spec.
"""
