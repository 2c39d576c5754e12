"""After the training: the model of a finished run is asked, served and evaluated."""
