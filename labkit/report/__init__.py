from labkit.report.late import put_off_iris

put_off_iris()  # before anything here imports altair or nbformat
