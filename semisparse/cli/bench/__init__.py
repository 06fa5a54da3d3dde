"""``semisparse bench``: one file per verb."""

import typer

from semisparse.cli.bench import compare, kernels, machine, model, parallel, plot, tune

app = typer.Typer(no_args_is_help=True, help="Measure kernels, models and this machine.")
app.command("kernels")(kernels.kernels)
app.command("model")(model.model)
app.command("parallel")(parallel.parallel)
app.command("machine")(machine.machine)
app.command("compare")(compare.compare)
app.command("tune")(tune.tune)
app.command("plot")(plot.plot)
