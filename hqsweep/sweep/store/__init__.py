"""The files of sweeps and runs: their folders, names, locks, seals and documents."""
