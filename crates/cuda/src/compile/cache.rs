//! Folders of compiled kernels.
//!
//! | folder | written by | used files |
//! | --- | --- | --- |
//! | the folders of [`AHEAD`], in order | `flash-sampling kernels build --out` | the newest compiler's |
//! | the cache ([`FOLDER`]) | the first use of a kernel, and `kernels build` | this compiler's, or the newest without one |
//!
//! The name of a file has a hash of its inputs (the kernel's file, the options, the whole source with every header),
//! and the compiler's version. A file is used only if it is complete, and only this user and root can write to it and
//! to its folder. A file is written under a temporary name and then renamed, so several processes may share a folder.
//! If a file cannot be read or written, the crate warns through `tracing` and compiles the kernel again.

use crate::compile::{CompilerVersion, KernelHeader, cached_kernel, permissions};
use std::collections::BTreeSet;
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The environment variable that names the cache; without it `$XDG_CACHE_HOME/flash-sampling`, then
/// `$HOME/.cache/flash-sampling`.
pub const FOLDER: &str = "FLASH_SAMPLING_CACHE";

/// The environment variable that names folders of kernels compiled ahead of time, separated as in `PATH`.
pub const AHEAD: &str = "FLASH_SAMPLING_KERNELS";

/// The cache folder; `None` if the environment names none.
pub fn folder() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable(FOLDER)
        .or_else(|| variable("XDG_CACHE_HOME").map(|home| home.join("flash-sampling")))
        .or_else(|| variable("HOME").map(|home| home.join(".cache/flash-sampling")))
}

/// The folders of kernels compiled ahead of time, from the environment. Warns once about each missing folder.
pub fn ahead() -> Vec<PathBuf> {
    let paths = std::env::var_os(AHEAD).unwrap_or_default();
    let folders: Vec<_> = std::env::split_paths(&paths).filter(|path| !path.as_os_str().is_empty()).collect();
    for folder in &folders {
        if let Err(error) = fs::metadata(folder)
            && error.kind() == io::ErrorKind::NotFound
        {
            warn(folder, "FLASH_SAMPLING_KERNELS names a folder that is not there:", &error);
        }
    }
    folders
}

/// A compiled kernel in a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// The file's path.
    pub path: PathBuf,
    /// The file's header.
    pub label: KernelHeader,
    /// The size of the machine code, in bytes.
    pub bytes: usize,
}

/// Reads a file's header and machine code. Warns once about an unusable file.
fn open(path: &Path) -> Option<(KernelHeader, Vec<u8>)> {
    let opened = permissions::read(path).and_then(|file| match cached_kernel::open(&file) {
        Some((label, code)) => Ok((label, code.to_vec())),
        None => Err(io::Error::new(io::ErrorKind::InvalidData, "it is damaged or cut short")),
    });
    opened.map_err(|error| warn(path, "a compiled kernel is not taken from", &error)).ok()
}

/// Returns the complete files of a folder, by name; empty if the folder does not exist. Warns about other files.
///
/// # Errors
/// The folder cannot be read, or other users may write to it.
pub fn list(folder: &Path) -> io::Result<Vec<Kept>> {
    match permissions::folder(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        trusted => trusted?,
    }
    let mut paths: Vec<_> = fs::read_dir(folder)?.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == cached_kernel::EXTENSION));
    paths.sort();
    let kept = |path: PathBuf| {
        let (label, code) = open(&path)?;
        Some(Kept { path, label, bytes: code.len() })
    };
    Ok(paths.into_iter().filter_map(kept).collect())
}

/// Reads the machine code of a recipe from a folder, compiled by the given compiler or by the newest.
pub(crate) fn find(folder: &Path, recipe: &str, compiler: Option<CompilerVersion>) -> Option<Vec<u8>> {
    match permissions::folder(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => {
            warn(folder, "compiled kernels are not taken from", &error);
            return None;
        }
        Ok(()) => {}
    }
    let entries = fs::read_dir(folder).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let of_recipe = entries.filter_map(|name| {
        let (found, version) = cached_kernel::of_file_name(&name)?;
        (found == recipe && compiler.is_none_or(|wanted| wanted == version)).then(|| (version, name.clone()))
    });
    let mut names: Vec<_> = of_recipe.collect();
    names.sort();
    names.into_iter().rev().find_map(|(version, name)| {
        let path = folder.join(name);
        let (label, code) = open(&path)?;
        let named = label.recipe == recipe && label.compiler == version;
        if !named {
            let error = io::Error::new(io::ErrorKind::InvalidData, "it holds another kernel than its name says");
            warn(&path, "a compiled kernel is not taken from", &error);
        }
        named.then_some(code)
    })
}

/// Stores machine code, first under a temporary name.
///
/// # Errors
/// The system's error, or the folder is writable for other users.
pub(crate) fn keep(folder: &Path, label: &KernelHeader, code: &[u8]) -> io::Result<PathBuf> {
    permissions::make_folder(folder)?;
    permissions::folder(folder)?;
    let path = folder.join(label.file_name());
    // A name that no other writer uses. Processes in containers may share the folder and also their process ids.
    let written = path.with_extension(format!("{:016x}.part", RandomState::new().hash_one(())));
    let result = permissions::write(&written, &label.seal(code)).and_then(|()| fs::rename(&written, &path));
    if result.is_err() {
        let _ = fs::remove_file(&written);
    }
    result.map(|()| path)
}

/// Warns once per path that the path is unusable.
pub(crate) fn warn(path: &Path, what: &str, error: &io::Error) {
    static TOLD: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    if TOLD.lock().unwrap_or_else(PoisonError::into_inner).insert(path.to_owned()) {
        tracing::warn!("{what} {}: {error}", path.display());
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A temporary folder, removed on drop.
    pub(crate) struct Folder(pub(crate) PathBuf);

    impl Folder {
        pub(crate) fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("flash-sampling-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            Folder(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    pub(crate) fn label(recipe: &str, major: u32, minor: u32) -> KernelHeader {
        KernelHeader {
            kernel: "k.cu".into(),
            instance: "A=1".into(),
            architecture: "sm_80".into(),
            compiler: CompilerVersion { major, minor },
            recipe: recipe.into(),
        }
    }

    #[test]
    fn the_requested_or_the_newest_compiler_is_found() {
        let folder = Folder::new("cache-find");
        let of = |major, minor| Some(CompilerVersion { major, minor });
        assert_eq!(find(&folder.0, "r", None), None);
        for (recipe, major, minor, code) in
            [("r", 13, 10, "b"), ("r", 13, 9, "a"), ("r", 9, 99, "c"), ("s", 14, 0, "d")]
        {
            keep(&folder.0, &label(recipe, major, minor), code.as_bytes()).unwrap();
        }
        assert_eq!(find(&folder.0, "r", None).unwrap(), b"b");
        assert_eq!(find(&folder.0, "r", of(13, 9)).unwrap(), b"a");
        assert_eq!(find(&folder.0, "r", of(14, 0)), None);
        assert_eq!(find(&folder.0, "t", None), None);
        assert_eq!(list(&folder.0).unwrap().len(), 4);
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 4, "something else was left behind");
    }

    #[test]
    fn a_damaged_file_is_passed_over_and_replaced() {
        let folder = Folder::new("cache-damaged");
        keep(&folder.0, &label("r", 13, 0), b"old").unwrap();
        let path = keep(&folder.0, &label("r", 13, 1), b"new").unwrap();
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() - 1]).unwrap();
        assert_eq!(find(&folder.0, "r", None).unwrap(), b"old");
        assert_eq!(list(&folder.0).unwrap().len(), 1);
        // A file with another recipe under this name is damaged too.
        fs::write(&path, label("s", 13, 1).seal(b"other")).unwrap();
        assert_eq!(find(&folder.0, "r", None).unwrap(), b"old");
        keep(&folder.0, &label("r", 13, 1), b"new").unwrap();
        assert_eq!(find(&folder.0, "r", None).unwrap(), b"new");
    }

    #[test]
    fn a_folder_that_cannot_be_is_an_error_value() {
        let folder = Folder::new("cache-unwritable");
        let path = keep(&folder.0, &label("r", 13, 0), b"code").unwrap();
        assert!(keep(&path.join("below a file"), &label("r", 13, 0), b"code").is_err());
        assert!(list(&path).is_err());
        assert!(list(&folder.0.join("none")).unwrap().is_empty());
    }

    #[cfg(unix)]
    #[test]
    fn a_folder_that_others_may_write_to_is_not_used() {
        use std::os::unix::fs::PermissionsExt;
        let folder = Folder::new("cache-shared");
        keep(&folder.0, &label("r", 13, 0), b"code").unwrap();
        fs::set_permissions(&folder.0, fs::Permissions::from_mode(0o777)).unwrap();
        assert_eq!(find(&folder.0, "r", None), None);
        assert!(list(&folder.0).is_err());
        let refused = keep(&folder.0, &label("r", 13, 1), b"code").unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
    }
}
