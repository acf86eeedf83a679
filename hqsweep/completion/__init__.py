"""Shell completion for bash and zsh: what may stand at the cursor (candidates.py), and who asks (shells.py)."""
