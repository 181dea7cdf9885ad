"""An executor that runs nothing: it asks a cost function how long each step would take."""
