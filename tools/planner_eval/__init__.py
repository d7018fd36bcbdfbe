"""How good the planner is: tables of published runs, the fit of its coefficients, and the figures
of docs/planner.md."""
