"""What commands have in common that work on scenarios: questions, cases of chaos, options.

For `commands`. Begin with `plan_scenario`.
"""
