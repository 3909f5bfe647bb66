"""What people look at: the progress of a run on a terminal; plots and reports come here too."""
