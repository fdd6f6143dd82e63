"""The only home of torch: model, pipeline arithmetic, data, optimizer, checkpoints."""
