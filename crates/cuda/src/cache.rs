//! Compiled kernels on disk.
//!
//! A file's name is a hash of everything that its content depends on: the kernel's name, the compiler's version, the
//! options, and the whole source with every header. A file is written under another name and moved into place, so that
//! processes may share the folder. Where it cannot be written, the kernels are compiled again by the next process.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Once;

/// The environment variable that names the folder; without it `$XDG_CACHE_HOME/flash-sampling`, then
/// `$HOME/.cache/flash-sampling`.
pub const FOLDER: &str = "FLASH_SAMPLING_CACHE";

/// The folder; `None` when the environment names none.
pub fn folder() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable(FOLDER)
        .or_else(|| variable("XDG_CACHE_HOME").map(|home| home.join("flash-sampling")))
        .or_else(|| variable("HOME").map(|home| home.join(".cache/flash-sampling")))
}

/// FNV-1a over 128 bits, each part ended by its length, so that no two lists of parts run together.
pub(crate) fn key(parts: &[&str]) -> String {
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    for part in parts {
        for byte in part.bytes().chain((part.len() as u64).to_le_bytes()) {
            hash = (hash ^ u128::from(byte)).wrapping_mul(PRIME);
        }
    }
    format!("{hash:032x}")
}

/// The kept bytes, or those that `make` gives, which are then kept.
pub(crate) fn get_or_make<E>(key: &str, make: impl FnOnce() -> Result<Vec<u8>, E>) -> Result<Vec<u8>, E> {
    let path = folder().map(|folder| folder.join(format!("{key}.cubin")));
    if let Some(bytes) = path.as_ref().and_then(|path| fs::read(path).ok()).filter(|bytes| !bytes.is_empty()) {
        return Ok(bytes);
    }
    let bytes = make()?;
    if let Some(path) = path {
        keep(&path, &bytes).unwrap_or_else(|error| warn(&path, &error));
    }
    Ok(bytes)
}

fn keep(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().expect("the path has a file name");
    fs::create_dir_all(folder)?;
    let written = path.with_extension(format!("{}.part", std::process::id()));
    let result = fs::write(&written, bytes).and_then(|()| fs::rename(&written, path));
    if result.is_err() {
        let _ = fs::remove_file(&written);
    }
    result
}

/// Says once that nothing is kept. A closed stderr is no reason to fail.
fn warn(path: &Path, error: &io::Error) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let folder = path.parent().unwrap_or(path).display();
        let _ = writeln!(io::stderr(), "flash-sampling: compiled kernels cannot be kept in {folder}: {error}");
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_differ_by_every_part() {
        assert_eq!(key(&["a", "b"]), key(&["a", "b"]));
        assert_ne!(key(&["ab", ""]), key(&["a", "b"]));
        assert_ne!(key(&["a", "b"]), key(&["b", "a"]));
    }

    #[test]
    fn a_file_is_kept_whole_and_an_unwritable_folder_is_an_error_value() {
        let folder = std::env::temp_dir().join(format!("flash-sampling-cache-{}", std::process::id()));
        let path = folder.join("sub/kernel.cubin");
        keep(&path, b"code").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"code");
        assert_eq!(fs::read_dir(folder.join("sub")).unwrap().count(), 1);
        assert!(keep(&path.join("below a file"), b"code").is_err());
        fs::remove_dir_all(&folder).unwrap();
    }
}
