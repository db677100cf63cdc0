"""A search for hyperparameters: many trainings, of which Optuna chooses what each is given."""
