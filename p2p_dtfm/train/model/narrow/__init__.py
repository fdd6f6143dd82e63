"""Models whose blocks write to few channels of the stream (`model.written_width`).

`fixed_code` is what the other channels hold; `whole_layers` makes a plain GPT of such a model.
"""
