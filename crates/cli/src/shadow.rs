//! `flash-sampling shadow`: writes the shadow of a head to a file.

use crate::args::ShadowArgs;
use crate::error::CommandError;
use crate::input::checkpoint::Checkpoint;
use crate::input::shadow::make;
use crate::input::tensor::{Role, Tensor};
use crate::interrupt::Interrupt;
use crate::output::bar;
use flash_sampling::{Matrix, Shadow, ShadowFileError, write_shadow};
use std::io::{self, Write};
use std::path::Path;
use tempfile::NamedTempFile;

/// Makes the shadow of a weight, and writes it.
///
/// # Errors
/// Bad flags, a weight that cannot be read or has no shadow, a file that cannot be written, Ctrl-C.
pub fn run(args: &ShadowArgs, out: &mut dyn Write, interrupt: &Interrupt) -> Result<u8, CommandError> {
    let path = args.out();
    let failed = |source: io::Error| CommandError::Write { what: path.display().to_string(), source };
    // Fails before the shadow is made.
    check(&path, args.force)?;
    let tensor = open(args)?;
    let weight = tensor.matrix()?;
    drop(temporary(&path).map_err(failed)?);
    let buffer = make(&weight)?;
    // After Ctrl-C, the process may end at any time in the line above.
    let mut file = Unfinished { file: temporary(&path).map_err(failed)?, interrupt };
    let written = write(&buffer.shadow(), &weight, &mut file);
    interrupt.check()?;
    match written {
        Ok(()) => {}
        Err(ShadowFileError::Write(error)) => return Err(failed(error)),
        Err(error) => return Err(CommandError::usage(error.to_string())),
    }
    file.file.as_file().sync_all().map_err(failed)?;
    let persisted = if args.force { file.file.persist(&path) } else { file.file.persist_noclobber(&path) };
    persisted.map_err(|error| failed(error.error))?;
    let (rows, cols, dtype) = (weight.rows(), weight.cols(), weight.dtype().name());
    writeln!(out, "{}: the shadow of a weight [{rows}, {cols}] in {dtype}", path.display())
        .map_err(CommandError::write("to standard output"))?;
    Ok(0)
}

/// Checks that the file is new, or a file that `force` replaces. No weight has the extension of a shadow.
fn check(path: &Path, force: bool) -> Result<(), CommandError> {
    let shown = path.display();
    match () {
        () if path.is_dir() => Err(CommandError::usage(format!("{shown} is a folder"))),
        () if !path.exists() => Ok(()),
        () if path.extension().is_none_or(|extension| extension != "shadow") => {
            Err(CommandError::usage(format!("{shown} exists, and only a file named *.shadow is replaced")))
        }
        () if !force => Err(CommandError::usage(format!("{shown} exists; --force replaces it"))),
        () => Ok(()),
    }
}

/// The weight that the flags name.
fn open(args: &ShadowArgs) -> Result<Tensor, CommandError> {
    Ok(match (&args.source.model, &args.source.weight) {
        (Some(model), _) => Checkpoint::open(model)?.weight,
        (None, Some(weight)) => Tensor::open(weight, Role::Weight)?,
        (None, None) => return Err(CommandError::usage("--model or --weight is required")),
    })
}

/// Creates a temporary file in the folder of `path`. Its name begins with the name of `path`, and its permissions are
/// the default ones.
fn temporary(path: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let name = path.file_name().unwrap_or_default();
    builder.prefix(name).suffix(".partial").tempfile_in(folder.unwrap_or(Path::new(".")))
}

/// Writes the file with a progress bar.
fn write(shadow: &Shadow<'_>, weight: &Matrix<'_>, file: &mut Unfinished<'_>) -> Result<(), ShadowFileError> {
    let bar = bar("writing bytes", (shadow.codes().len() + 3 * size_of_val(shadow.scales())) as u64);
    let written = write_shadow(shadow, weight, &mut bar.wrap_write(file));
    bar.finish_and_clear();
    written
}

/// A temporary file, which is removed unless it is complete. After Ctrl-C, a write is an error.
struct Unfinished<'a> {
    file: NamedTempFile,
    interrupt: &'a Interrupt,
}

impl Write for Unfinished<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.interrupt.check().map_err(io::Error::other)?;
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
