"""What tests share: inputs, models, functions that ranks run, stand-ins for other programs.

A folder here serves the tests in the folder of its name.
"""
