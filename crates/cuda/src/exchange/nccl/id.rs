//! The id that ranks of an NCCL group share before they connect.

use super::{failed, is_present};
use crate::error::CudaError;
use core::fmt;
use core::str::FromStr;
use core::time::Duration;
use cudarc::nccl::{result, sys};
use std::io::Write;
use std::path::Path;
use std::time::Instant;

const SIZE: usize = 128;

/// The id of a group of ranks, created by one rank and shared with all ranks.
///
/// The id travels as bytes over a transport, or as text (hexadecimal digits) [in an environment
/// variable](NcclId::by_variable) or [in a shared file](NcclId::by_file).
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct NcclId([u8; SIZE]);

impl fmt::Debug for NcclId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("NcclId").finish_non_exhaustive()
    }
}

impl fmt::Display for NcclId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for NcclId {
    type Err = CudaError;

    /// Parses the text that `Display` writes.
    fn from_str(text: &str) -> Result<Self, CudaError> {
        let digits: Option<Vec<u8>> = text.trim().chars().map(|c| c.to_digit(16).map(|digit| digit as u8)).collect();
        let bytes: Option<Vec<u8>> =
            digits.map(|digits| digits.as_chunks::<2>().0.iter().map(|[a, b]| a << 4 | b).collect());
        let is_whole = text.trim().len() == 2 * SIZE;
        bytes.filter(|_| is_whole).and_then(|bytes| NcclId::from_bytes(&bytes)).ok_or(CudaError::NcclId)
    }
}

impl NcclId {
    /// Creates the id of a new group.
    ///
    /// # Errors
    /// [`CudaError::Unavailable`] if NCCL cannot be loaded; [`CudaError::Nccl`].
    pub fn new() -> Result<NcclId, CudaError> {
        if !is_present() {
            return Err(CudaError::unavailable("the library libnccl cannot be loaded"));
        }
        let id = result::get_uniqueid().map_err(failed("name a group"))?;
        Ok(NcclId(id.internal.map(|byte| byte.to_ne_bytes()[0])))
    }

    /// The bytes of the id.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Creates an id from bytes; `None` if their number is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Option<NcclId> {
        bytes.try_into().ok().map(NcclId)
    }

    /// Reads the id from the environment variable `name`.
    ///
    /// The ranks' launcher creates the id with [`NcclId::new`] and sets its text for each rank. An id serves one group.
    ///
    /// # Errors
    /// [`CudaError::NoNcclId`] with the variable's name: the variable is not set, or is not an id.
    pub fn by_variable(name: &str) -> Result<NcclId, CudaError> {
        let refused =
            |reason: String| CudaError::NoNcclId { place: format!("the environment variable {name}"), reason };
        let text = std::env::var(name).map_err(|error| refused(error.to_string()))?;
        text.parse().map_err(|error: CudaError| refused(error.to_string()))
    }

    /// Shares the id in a new file: rank 0 creates the id and writes the file, other ranks wait for it.
    ///
    /// # Errors
    /// As [`NcclId::new`] on rank 0. [`CudaError::NoNcclId`] with the file's name: the file cannot be written, does not
    /// appear within `limit`, or is not an id.
    pub fn by_file(path: &Path, rank: usize, limit: Duration) -> Result<NcclId, CudaError> {
        let refused = |reason: String| CudaError::NoNcclId { place: format!("the file {}", path.display()), reason };
        if rank == 0 {
            let id = NcclId::new()?;
            // A rename publishes the complete file, so no rank reads a partial file.
            let mut part = path.as_os_str().to_owned();
            part.push(format!(".{}", std::process::id()));
            let written = std::fs::File::create(&part).and_then(|mut file| write!(file, "{id}"));
            written.and_then(|()| std::fs::rename(&part, path)).map_err(|error| refused(error.to_string()))?;
            return Ok(id);
        }
        let begun = Instant::now();
        loop {
            match std::fs::read_to_string(path) {
                Ok(text) => return text.parse().map_err(|error: CudaError| refused(error.to_string())),
                Err(error) if begun.elapsed() >= limit => return Err(refused(error.to_string())),
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }

    pub(crate) fn raw(&self) -> sys::ncclUniqueId {
        sys::ncclUniqueId { internal: self.0.map(|byte| byte as core::ffi::c_char) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_bytes_carry_an_id() {
        let id = NcclId(core::array::from_fn(|i| (i * 37) as u8));
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_eq!(format!(" {id}\n").parse(), Ok(id));
        assert_eq!(NcclId::from_bytes(id.as_bytes()), Some(id));
        assert_eq!(NcclId::from_bytes(&id.as_bytes()[1..]), None);
        for wrong in [String::new(), id.to_string()[1..].into(), format!("{id}0"), id.to_string().replacen('0', "g", 1)]
        {
            assert_eq!(wrong.parse::<NcclId>(), Err(CudaError::NcclId), "{wrong}");
        }
    }

    #[test]
    fn a_file_that_does_not_come_or_holds_something_else_is_named() {
        let path = std::env::temp_dir().join(format!("flash-sampling-id-{}", std::process::id()));
        let error = NcclId::by_file(&path, 1, Duration::from_millis(5)).unwrap_err();
        let name = path.to_str().unwrap();
        assert!(matches!(&error, CudaError::NoNcclId { place, .. } if place.contains(name)), "{error}");
        let id = NcclId([7; SIZE]);
        std::fs::write(&path, id.to_string()).unwrap();
        assert_eq!(NcclId::by_file(&path, 1, Duration::ZERO), Ok(id));
        std::fs::write(&path, "no id").unwrap();
        assert!(matches!(NcclId::by_file(&path, 1, Duration::ZERO), Err(CudaError::NoNcclId { .. })));
        std::fs::remove_file(&path).unwrap();
    }

    /// Runs in a child process with the variable.
    #[test]
    fn an_environment_variable_names_a_group_or_is_named() {
        const NAME: &str = "FLASH_SAMPLING_TEST_NCCL_ID";
        let id = NcclId(core::array::from_fn(|i| (i * 91) as u8));
        if std::env::var_os(NAME).is_some() {
            assert_eq!(NcclId::by_variable(NAME), Ok(id));
            return;
        }
        let (_, module) = module_path!().split_once("::").unwrap();
        let test = format!("{module}::an_environment_variable_names_a_group_or_is_named");
        let with = |text: &str| {
            let mut process = std::process::Command::new(std::env::current_exe().unwrap());
            let output = process.args(["--exact", &test]).env(NAME, text).output().unwrap();
            assert!(String::from_utf8_lossy(&output.stdout).contains("running 1 test"));
            output.status.success()
        };
        assert!(with(&id.to_string()));
        // The negative control: the id of another group.
        assert!(!with(&NcclId([7; SIZE]).to_string()));
        for (name, what) in [(NAME, "not found"), ("PATH", "256 hexadecimal digits")] {
            let error = NcclId::by_variable(name).unwrap_err();
            assert!(matches!(error, CudaError::NoNcclId { .. }));
            let text = error.to_string();
            assert!(text.contains(name) && text.contains(what), "{text}");
        }
    }
}
