//! The shadow of a head's weight, from a file or made from the weight.

use crate::error::CommandError;
use crate::input::tensor::map;
use crate::input::{LoadError, Problem};
use crate::output::bar;
use flash_sampling::cpu::make_shadow;
use flash_sampling::{HeadError, Matrix, Shadow, ShadowBuffer, ShadowFile};
use indicatif::ProgressBar;
use memmap2::Mmap;
use std::path::Path;

/// The shadow of a weight.
#[derive(Debug)]
pub enum LoadedShadow {
    /// Made from the weight, in memory.
    Made(ShadowBuffer),
    /// In a mapped file.
    Mapped(ShadowFile<Mmap>),
}

impl LoadedShadow {
    /// Maps the file with the shadow of `weight`, or makes the shadow if there is no file.
    ///
    /// # Errors
    /// [`CommandError::Load`] for a file that is not the shadow of this weight.
    /// [`CommandError::Head`] for a weight whose type has no shadow.
    pub fn new(file: Option<&Path>, weight: &Matrix<'_>) -> Result<Self, CommandError> {
        match file {
            // Without this check, the error would name the type in the file, and advise another file.
            Some(_) if !weight.dtype().is_float() => Err(HeadError::ShadowType { dtype: weight.dtype() }.into()),
            Some(file) => Ok(LoadedShadow::Mapped(open(file, weight)?)),
            None => Ok(LoadedShadow::Made(make(weight)?)),
        }
    }

    /// The shadow.
    pub fn shadow(&self) -> Shadow<'_> {
        match self {
            LoadedShadow::Made(buffer) => buffer.shadow(),
            LoadedShadow::Mapped(file) => file.shadow(),
        }
    }
}

/// Maps the file with the shadow of `weight`.
fn open(file: &Path, weight: &Matrix<'_>) -> Result<ShadowFile<Mmap>, LoadError> {
    ShadowFile::new(map(file)?, weight).map_err(|error| Problem::from(error).at(file))
}

/// Makes the shadow of a weight on all threads. A large weight has a progress bar.
pub(crate) fn make(weight: &Matrix<'_>) -> Result<ShadowBuffer, HeadError> {
    /// Bytes of a weight whose shadow takes about a second on two cores.
    const LARGE: usize = 1 << 28;
    let bar = match weight.bytes().len() >= LARGE {
        true => bar("making the shadow", weight.rows() as u64),
        false => ProgressBar::hidden(),
    };
    let made = make_shadow(weight, |rows| bar.inc(rows as u64));
    bar.finish_and_clear();
    made
}
