//! `flash-sampling kernels list`: the compiled kernels of all folders.

use super::write_json;
use crate::args::Format;
use crate::error::CommandError;
use flash_sampling::cuda::{ahead, cache};
use serde::Serialize;
use std::io::{self, Write};
use std::path::PathBuf;

/// One file in the report of `list`.
#[derive(Debug, Serialize)]
struct Listed {
    path: PathBuf,
    kernel: String,
    instance: String,
    architecture: String,
    compiler: String,
    bytes: usize,
    /// Whether this program's sources made it.
    current: bool,
}

/// Lists the folders of `FLASH_SAMPLING_KERNELS`, then the cache.
///
/// # Errors
/// Standard output cannot be written.
pub(super) fn list(format: Format, out: &mut dyn Write) -> Result<u8, CommandError> {
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
    if lines.is_empty() {
        let folders: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
        let place = if folders.is_empty() { "no folder".into() } else { folders.join(", ") };
        tracing::info!("no compiled kernels ({place}): `kernels build` or the first use of a GPU compiles them");
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
