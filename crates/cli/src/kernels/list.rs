//! `flash-sampling kernels list`: the compiled kernels of all folders.

use super::write_json;
use crate::args::Format;
use crate::error::CommandError;
use flash_sampling::cuda::ahead;
use flash_sampling::cuda::cache::{self, Kept};
use serde_json::{Value, json};
use std::io::{self, Write};
use std::path::PathBuf;

/// Lists the folders of `FLASH_SAMPLING_KERNELS`, then the cache.
pub(super) fn list(format: Format, out: &mut dyn Write) -> Result<u8, CommandError> {
    let mut lines = Vec::new();
    let folders: Vec<_> = cache::ahead().into_iter().chain(cache::folder()).collect();
    for folder in &folders {
        match cache::list(folder) {
            Err(error) => tracing::warn!("{} is not used: {error}", folder.display()),
            Ok(kept) => lines.extend(kept),
        }
    }
    if lines.is_empty() {
        let folders: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
        let place = if folders.is_empty() { "no folder".into() } else { folders.join(", ") };
        tracing::info!("no compiled kernels ({place}): `kernels build` or the first use of a GPU compiles them");
    }
    let written = match format {
        Format::Json => write_json(out, lines.iter().map(json)),
        Format::Text => write_list(out, &folders, &lines),
    };
    written.map_err(CommandError::write("to standard output")).map(|()| 0)
}

fn json(kept: &Kept) -> Value {
    json!({
        "path": kept.path,
        "kernel": kept.label.kernel,
        "instance": kept.label.instance,
        "architecture": kept.label.architecture,
        "compiler": kept.label.compiler.to_string(),
        "bytes": kept.bytes,
        // Whether this program's sources made it.
        "current": ahead::is_current(&kept.label),
    })
}

fn write_list(out: &mut dyn Write, folders: &[PathBuf], lines: &[Kept]) -> io::Result<()> {
    for folder in folders {
        let inside: Vec<_> = lines.iter().filter(|kept| kept.path.parent() == Some(folder)).collect();
        writeln!(out, "{}: {} compiled kernels", folder.display(), inside.len())?;
        for Kept { label, bytes, .. } in inside {
            let (architecture, compiler) = (&label.architecture, label.compiler.to_string());
            let state = if ahead::is_current(label) { "" } else { "  (of other sources: not used)" };
            let name = format!("{} {}{state}", label.kernel, label.instance);
            writeln!(out, "  {architecture:<7}  compiler {compiler:<5} {bytes:>8} bytes  {name}")?;
        }
    }
    Ok(())
}
