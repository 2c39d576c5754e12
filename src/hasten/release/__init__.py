"""After the training: the model of a finished run is chatted with, evaluated, exported."""
