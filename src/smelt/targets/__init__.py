"""Hardware as numbers: operators, the devices that run them, and the tables of how long they take."""
