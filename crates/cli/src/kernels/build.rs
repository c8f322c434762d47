//! `flash-sampling kernels build`: compiles all kernels into a folder.

use super::write_json;
use crate::args::{Format, KernelsBuildArgs};
use crate::error::CommandError;
use crate::interrupt::Interrupt;
use crate::output::progress;
use flash_sampling::BuildError;
use flash_sampling::cuda::{Architecture, Resources, ahead, cache};
use serde::Serialize;
use std::io::{self, Write};
use std::num::NonZero;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// One compiled kernel instance.
#[derive(Debug, Serialize)]
struct Line {
    architecture: String,
    kernel: &'static str,
    instance: String,
    path: PathBuf,
    /// Whether it was compiled now, or was in the folder.
    compiled: bool,
    errors: Vec<String>,
    /// Only with `--check`.
    #[serde(flatten)]
    report: Option<Report>,
}

/// The result of `--check`.
#[derive(Debug, Serialize)]
struct Report {
    hot: bool,
    functions: Vec<Function>,
    warnings: Vec<String>,
    faults: Vec<String>,
}

/// One function of an instance.
#[derive(Debug, Serialize)]
struct Function {
    name: String,
    registers: u32,
    shared_bytes: u32,
    local_bytes: u32,
    spilled_bytes: u32,
}

impl Function {
    /// Resources of an entry point, or of another function with local memory.
    fn of(resources: Resources) -> Option<Function> {
        let spilled_bytes = resources.spill_stores + resources.spill_loads;
        let is_listed = resources.entry || resources.stack + spilled_bytes > 0;
        is_listed.then_some(Function {
            name: resources.function,
            registers: resources.registers,
            shared_bytes: resources.shared,
            local_bytes: resources.stack,
            spilled_bytes,
        })
    }
}

impl Line {
    fn of(built: ahead::Built) -> Line {
        let report = built.report.map(|report| Report {
            hot: report.hot,
            functions: report.resources.into_iter().filter_map(Function::of).collect(),
            warnings: report.warnings,
            faults: report.faults,
        });
        Line {
            architecture: built.architecture.to_string(),
            kernel: built.kernel,
            instance: built.instance,
            path: built.path,
            compiled: built.compiled,
            errors: built.errors,
            report,
        }
    }

    /// Reasons not to use the instance.
    fn refused(&self) -> impl Iterator<Item = &String> {
        let hot = self.report.iter().filter(|report| report.hot);
        self.errors.iter().chain(hot.flat_map(|report| &report.faults))
    }

    /// Kernel and instance.
    fn name(&self) -> String {
        format!("{} {}", self.kernel, self.instance).trim_end().to_owned()
    }
}

/// Compiles missing kernels, or all. The exit code is 1 if `--check` finds a fault in a hot kernel.
///
/// # Errors
/// Bad flags, no compiler, a folder that cannot be used, Ctrl-C.
pub(super) fn build(args: &KernelsBuildArgs, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
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
    let (bar, start) = (progress::bar("compiling", ahead::count(&architectures, &files) as u64), Instant::now());
    let mut lines = Vec::new();
    let mut each = |built: ahead::Built| {
        bar.set_message(format!("{} for {}", built.kernel, built.architecture));
        bar.inc(1);
        lines.push(Line::of(built));
        if interrupt.is_interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let outcome = ahead::build(&architectures, &files, &folder, anew, jobs, &mut each);
    bar.finish_and_clear();
    outcome.map_err(BuildError::from)?;
    interrupt.check()?;
    // Short names first, which have smaller numbers.
    lines.sort_by_cached_key(|line| {
        let [instance, architecture] = [&line.instance, &line.architecture].map(|name| (name.len(), name.clone()));
        (line.kernel, instance, architecture)
    });
    for line in &lines {
        for fault in line.refused() {
            tracing::warn!("{} for {}: {fault}", line.name(), line.architecture);
        }
    }
    let summary = summary(&lines, &folder, start.elapsed());
    let written = match args.format {
        Format::Text => write_text(out, &lines, &summary),
        Format::Json => {
            tracing::info!("{summary}");
            write_json(out, &lines)
        }
    };
    written.map_err(CommandError::write("to standard output"))?;
    Ok(u8::from(args.check && lines.iter().any(|line| line.refused().next().is_some())))
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

/// What was done, in a line.
fn summary(lines: &[Line], folder: &Path, took: Duration) -> String {
    let are = if lines.len() == 1 { "kernel is" } else { "kernels are" };
    let compiled = lines.iter().filter(|line| line.compiled).count();
    let how = match lines.len() - compiled {
        0 => format!("compiled in {:.1} s", took.as_secs_f64()),
        _ if compiled == 0 => "there before".to_owned(),
        there => format!("{compiled} compiled in {:.1} s, {there} there before", took.as_secs_f64()),
    };
    format!("{} {are} in {}: {how}", lines.len(), folder.display())
}

fn write_text(out: &mut dyn Write, lines: &[Line], summary: &str) -> io::Result<()> {
    let reported: Vec<_> = lines.iter().filter_map(|line| Some((line, line.report.as_ref()?))).collect();
    if !reported.is_empty() {
        write_table(out, &reported)?;
    }
    writeln!(out, "{summary}")
}

fn write_table(out: &mut dyn Write, reported: &[(&Line, &Report)]) -> io::Result<()> {
    let rows = || reported.iter().flat_map(|(line, report)| report.functions.iter().map(move |f| (line, report, f)));
    let instances = reported.iter().map(|(line, _)| line.name().len()).max().unwrap_or(0);
    let functions = rows().map(|(.., function)| function.name.len()).max().unwrap_or(0).max(8);
    writeln!(
        out,
        "{:<instances$}  {:<7}  {:<functions$}  {:>9}  {:>6}  {:>5}  {:>7}  verdict",
        "kernel", "arch", "function", "registers", "shared", "local", "spilled"
    )?;
    for (line, report, function) in rows() {
        let verdict = match (line.refused().next(), report.faults.is_empty()) {
            (Some(_), _) => "FAULTY",
            (None, true) => "good",
            (None, false) => "good enough: not hot",
        };
        writeln!(
            out,
            "{:<instances$}  {:<7}  {:<functions$}  {:>9}  {:>6}  {:>5}  {:>7}  {verdict}",
            line.name(),
            line.architecture,
            function.name,
            function.registers,
            function.shared_bytes,
            function.local_bytes,
            function.spilled_bytes,
        )?;
    }
    for (line, report) in reported {
        for warning in &report.warnings {
            writeln!(out, "{} for {}: {warning}", line.name(), line.architecture)?;
        }
    }
    Ok(())
}
