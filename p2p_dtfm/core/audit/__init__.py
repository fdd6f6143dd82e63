"""Whose work of a step is computed again, by whom, and what comes of it.

Begin with `work`: what is compared; then `draw` and `claim_book`. Why it is so, the decisions say:

- 56 (`docs/decisions/0056-audits-before-a-commit.md`): `work`, `draw`, `claim_book`, `boundaries`;
- 72, who goes when two words differ: `accounts`, `judging`, `auditors_words`;
- 73, new keys and the rate after a verdict: `roles`, `draw`;
- 75, steps that are done again: `earlier_claims`;
- 76, losses and norms: `told_losses`, `work`, `judging`;
- 77, plans that can be audited: `auditors`, `alike_pipelines`;
- 27, how fast each peer is taken to be: `believed_speeds`, `explained_speeds`.
"""
