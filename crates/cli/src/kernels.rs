//! `flash-sampling kernels build`: compiles all kernels into a folder.

use crate::args::{KernelsBuildArgs, KernelsCommand};
use crate::error::CommandError;
use crate::interrupt::Interrupt;
use crate::output::{bar, line};
use flash_sampling::BuildError;
use flash_sampling::cuda::ahead::{self, Built, Report};
use flash_sampling::cuda::{Architecture, Resources, cache};
use std::io::{self, Write};
use std::num::NonZero;
use std::ops::ControlFlow;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Reasons not to use an instance.
fn refused(built: &Built) -> impl Iterator<Item = &String> {
    let hot = built.report.iter().filter(|report| report.hot);
    built.errors.iter().chain(hot.flat_map(|report| &report.faults))
}

fn name(built: &Built) -> String {
    format!("{} for {}", format!("{} {}", built.kernel, built.instance).trim_end(), built.architecture)
}

/// The functions of a report: entry points, and other functions with local memory.
fn functions(report: &Report) -> impl Iterator<Item = &Resources> {
    report.resources.iter().filter(|function| function.entry || function.stack + spilled(function) > 0)
}

fn spilled(function: &Resources) -> u32 {
    function.spill_stores + function.spill_loads
}

/// Compiles missing kernels, or all. The exit code is 1 if `--check` finds a fault in a hot kernel.
///
/// # Errors
/// Bad flags, no compiler, a folder that cannot be used, Ctrl-C.
pub fn run(command: &KernelsCommand, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
    let KernelsCommand::Build(args) = command;
    let architectures = architectures(args)?;
    let files = files(args)?;
    let folder = args.out.clone().or_else(cache::folder);
    let folder = folder.ok_or_else(|| CommandError::usage("--out is needed: no environment variable names a cache"))?;
    let jobs = args.jobs.map_or_else(|| thread::available_parallelism().map_or(1, NonZero::get), usize::from);
    let anew = match (args.check, args.force) {
        (true, _) => ahead::RebuildPolicy::Reported,
        (false, true) => ahead::RebuildPolicy::All,
        (false, false) => ahead::RebuildPolicy::Missing,
    };
    let skip: Vec<_> = args.skip.iter().map(String::as_str).collect();
    let selection = ahead::Selection { architectures: &architectures, files: &files, skip: &skip };
    let (bar, start) = (bar("compiling", selection.count() as u64), Instant::now());
    let mut lines = Vec::new();
    let mut each = |built: Built| {
        bar.set_message(format!("{} for {}", built.kernel, built.architecture));
        bar.inc(1);
        lines.push(built);
        if interrupt.is_interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let outcome = ahead::build(&selection, &folder, anew, jobs, &mut each);
    bar.finish_and_clear();
    outcome.map_err(BuildError::from)?;
    interrupt.check()?;
    // Short names first, which have smaller numbers.
    lines.sort_by_cached_key(|built| (built.kernel, built.instance.len(), built.instance.clone(), built.architecture));
    for built in &lines {
        refused(built).for_each(|fault| tracing::warn!("{}: {fault}", name(built)));
    }
    let summary = summary(&lines, &folder, start.elapsed());
    write_text(out, &lines, &summary).map_err(CommandError::write("to standard output"))?;
    Ok(u8::from(args.check && lines.iter().any(|built| refused(built).next().is_some())))
}

fn architectures(args: &KernelsBuildArgs) -> Result<Vec<Architecture>, CommandError> {
    let architectures = args.arch.iter().map(|name| name.parse()).collect::<Result<_, _>>();
    architectures.map_err(|error| CommandError::usage(format!("--arch: {error}")))
}

fn files(args: &KernelsBuildArgs) -> Result<Vec<&str>, CommandError> {
    let files: Vec<_> = args.kernel.iter().map(String::as_str).collect();
    match files.iter().find(|file| !ahead::kernels().any(|kernel| kernel == **file)) {
        None => Ok(files),
        Some(unknown) => {
            let known = ahead::kernels().collect::<Vec<_>>().join(", ");
            Err(CommandError::usage(format!("--kernel: unknown file '{unknown}'; known are {known}")))
        }
    }
}

/// The numbers of kernels and the time, on one line.
fn summary(lines: &[Built], folder: &Path, took: Duration) -> String {
    let compiled = lines.iter().filter(|built| built.compiled).count();
    let how = match lines.len() - compiled {
        0 => format!("compiled in {:.1} s", took.as_secs_f64()),
        _ if compiled == 0 => "there before".to_owned(),
        there => format!("{compiled} compiled in {:.1} s, {there} there before", took.as_secs_f64()),
    };
    format!("{} in {}: {how}", line::count(lines.len(), "kernel"), folder.display())
}

fn write_text(out: &mut dyn Write, lines: &[Built], summary: &str) -> io::Result<()> {
    for (built, report) in lines.iter().filter_map(|built| Some((built, built.report.as_ref()?))) {
        let verdict = match (refused(built).next(), report.faults.is_empty()) {
            (Some(_), _) => "FAULTY",
            (None, true) => "good",
            (None, false) => "good enough: not hot",
        };
        writeln!(out, "{}: {verdict}", name(built))?;
        for function in functions(report) {
            let Resources { function: name, registers, shared, stack, .. } = function;
            let spilled = spilled(function);
            writeln!(out, "  {name}: {registers} registers, bytes {shared} shared, {stack} local, {spilled} spilled")?;
        }
        report.warnings.iter().try_for_each(|warning| writeln!(out, "  {warning}"))?;
    }
    writeln!(out, "{summary}")
}
