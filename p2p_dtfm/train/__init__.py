"""The only home of torch: the model, a stage's arithmetic, data, optimizer, checkpoints.

Knows no peers. Begin with `model.gpt` and `stage.stage_runner`.
"""
