"""How long a step of a plan takes in a scenario, message by message, and where the time goes.

Imports `scenario`. Begin with `simulator.simulate_step`.
"""
