"""Gather and Ready: from an attempt that is opened to the view that its contributors agree on.

Begin with `gathering`; `flooding` tells the others, `gather_reception` judges what they tell.
"""
