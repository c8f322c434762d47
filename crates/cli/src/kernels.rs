//! `flash-sampling kernels`: CUDA kernels compiled ahead of time.

use crate::args::{Format, KernelsBuildArgs, KernelsCommand};
use crate::error::CommandError;
use crate::interrupt::Interrupt;
use crate::progress;
use flash_sampling::BuildError;
use flash_sampling::cuda::{Architecture, Resources, ahead, cache};
use serde::Serialize;
use std::io::{self, Write};
use std::num::NonZero;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::thread;

/// Does what is asked. The exit code is 1 when `build --check` finds a fault in a hot kernel.
///
/// # Errors
/// Bad flags, no compiler, a folder that cannot be used, Ctrl-C.
pub fn run(command: &KernelsCommand, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
    match command {
        KernelsCommand::Build(args) => build(args, out, interrupt),
        KernelsCommand::List { format } => list(*format, out),
    }
}

/// One instance in the report of `build`.
#[derive(Debug, Serialize)]
struct Line {
    architecture: String,
    kernel: &'static str,
    instance: String,
    hot: bool,
    path: PathBuf,
    functions: Vec<Function>,
    warnings: Vec<String>,
    faults: Vec<String>,
    errors: Vec<String>,
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
    /// Functions that are no entry have no registers of their own, and are told of when they have local memory.
    fn of(resources: Resources) -> Option<Function> {
        let spilled_bytes = resources.spill_stores + resources.spill_loads;
        let told = resources.entry || resources.stack + spilled_bytes > 0;
        told.then_some(Function {
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
        Line {
            architecture: built.architecture.to_string(),
            kernel: built.kernel,
            instance: built.instance,
            hot: built.hot,
            path: built.path,
            functions: built.resources.into_iter().filter_map(Function::of).collect(),
            warnings: built.warnings,
            faults: built.faults,
            errors: built.errors,
        }
    }

    /// Why it must not be used.
    fn refused(&self) -> impl Iterator<Item = &String> {
        self.errors.iter().chain(self.faults.iter().filter(|_| self.hot))
    }

    /// Kernel and instance.
    fn name(&self) -> String {
        format!("{} {}", self.kernel, self.instance).trim_end().to_owned()
    }
}

fn build(args: &KernelsBuildArgs, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
    let architecture = |name: &String| name.parse::<Architecture>();
    let architectures: Vec<_> = args
        .arch
        .iter()
        .map(architecture)
        .collect::<Result<_, _>>()
        .map_err(|error| CommandError::usage(format!("--arch: {error}")))?;
    let files: Vec<_> = args.kernel.iter().map(String::as_str).collect();
    if let Some(unknown) = files.iter().find(|file| !ahead::kernels().any(|kernel| kernel == **file)) {
        let known = ahead::kernels().collect::<Vec<_>>().join(", ");
        return Err(CommandError::usage(format!("--kernel: there is no '{unknown}'; there are {known}")));
    }
    let folder = args.out.clone().or_else(cache::folder);
    let folder = folder.ok_or_else(|| CommandError::usage("--out is needed: the environment names no cache"))?;
    let jobs = args.jobs.map_or_else(|| thread::available_parallelism().map_or(1, NonZero::get), usize::from);
    let bar = progress::bar("compiling", ahead::count(&architectures, &files) as u64);
    let mut lines = Vec::new();
    let mut each = |built| {
        lines.push(Line::of(built));
        bar.inc(1);
        if interrupt.asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let outcome = ahead::build(&architectures, &files, &folder, jobs, &mut each);
    bar.finish_and_clear();
    outcome.map_err(BuildError::from)?;
    interrupt.check()?;
    // Smaller numbers first: they make shorter names.
    lines.sort_by_cached_key(|line| {
        let [instance, architecture] = [&line.instance, &line.architecture].map(|name| (name.len(), name.clone()));
        (line.kernel, instance, architecture)
    });
    let written = match args.format {
        Format::Text => write_table(out, &lines),
        Format::Json => write_json(out, &lines),
    };
    written.map_err(CommandError::write("to standard output"))?;
    let are = if lines.len() == 1 { "kernel is" } else { "kernels are" };
    tracing::info!("{} {are} in {}", lines.len(), folder.display());
    let mut is_faulty = false;
    for line in &lines {
        for fault in line.refused() {
            is_faulty = true;
            tracing::warn!("{} for {}: {fault}", line.name(), line.architecture);
        }
    }
    Ok(u8::from(args.check && is_faulty))
}

fn write_table(out: &mut dyn Write, lines: &[Line]) -> io::Result<()> {
    let rows = || lines.iter().flat_map(|line| line.functions.iter().map(move |function| (line, function)));
    let instances = lines.iter().map(|line| line.name().len()).max().unwrap_or(0);
    let functions = rows().map(|(_, function)| function.name.len()).max().unwrap_or(0).max(8);
    writeln!(
        out,
        "{:<instances$}  {:<7}  {:<functions$}  {:>9}  {:>6}  {:>5}  {:>7}  verdict",
        "kernel", "arch", "function", "registers", "shared", "local", "spilled"
    )?;
    for (line, function) in rows() {
        let verdict = match (line.refused().next(), line.faults.is_empty()) {
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
    for line in lines {
        for warning in &line.warnings {
            writeln!(out, "{} for {}: {warning}", line.name(), line.architecture)?;
        }
    }
    Ok(())
}

fn write_json<T: Serialize>(out: &mut dyn Write, lines: &[T]) -> io::Result<()> {
    for line in lines {
        serde_json::to_writer(&mut *out, line)?;
        writeln!(out)?;
    }
    Ok(())
}

/// One file in the report of `list`.
#[derive(Debug, Serialize)]
struct Listed {
    path: PathBuf,
    kernel: String,
    instance: String,
    architecture: String,
    compiler: String,
    bytes: usize,
    /// Whether it is of this program's sources.
    current: bool,
}

fn list(format: Format, out: &mut dyn Write) -> Result<u8, CommandError> {
    let mut lines = Vec::new();
    let folders: Vec<_> = cache::ahead().into_iter().chain(cache::folder()).collect();
    for folder in &folders {
        match cache::list(folder) {
            Err(error) => tracing::warn!("{} is not used: {error}", folder.display()),
            Ok(kept) => lines.extend(kept.into_iter().map(|kept| Listed {
                current: ahead::is_current(&kept.label),
                path: kept.path,
                kernel: kept.label.kernel,
                instance: kept.label.instance,
                architecture: kept.label.architecture,
                compiler: kept.label.compiler.to_string(),
                bytes: kept.bytes,
            })),
        }
    }
    let written = match format {
        Format::Json => write_json(out, &lines),
        Format::Text => write_list(out, &folders, &lines),
    };
    written.map_err(CommandError::write("to standard output")).map(|()| 0)
}

fn write_list(out: &mut dyn Write, folders: &[PathBuf], lines: &[Listed]) -> io::Result<()> {
    for folder in folders {
        let inside: Vec<_> = lines.iter().filter(|line| line.path.parent() == Some(folder)).collect();
        writeln!(out, "{}: {} compiled kernels", folder.display(), inside.len())?;
        for line in inside {
            let Listed { kernel, instance, architecture, compiler, bytes, current, .. } = line;
            let state = if *current { "" } else { "  (of other sources: not used)" };
            writeln!(out, "  {architecture:<7}  compiler {compiler:<5} {bytes:>8} bytes  {kernel} {instance}{state}")?;
        }
    }
    Ok(())
}
