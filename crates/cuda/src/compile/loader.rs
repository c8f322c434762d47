//! The sources of a kernel's machine code: folders compiled ahead of time, the cache, the compiler.

use crate::compile::{
    Architecture, CompilerVersion, Instance, KernelHeader, KernelSource, cache, cached_kernel, nvrtc, sources,
};
use crate::error::CudaError;
use std::path::PathBuf;

/// The folders of compiled kernels.
#[derive(Clone, Debug, Default)]
pub(crate) struct Folders {
    pub(crate) ahead: Vec<PathBuf>,
    pub(crate) cache: Option<PathBuf>,
}

impl Folders {
    pub(crate) fn of_environment() -> Folders {
        Folders { ahead: cache::ahead(), cache: cache::folder() }
    }
}

/// A request for an instance of a kernel, for an architecture.
#[derive(Clone, Debug)]
pub(crate) struct Request<'a> {
    pub(crate) kernel: &'a KernelSource,
    pub(crate) instance: &'a Instance,
    pub(crate) architecture: Architecture,
}

impl Request<'_> {
    /// Returns the header of a cache entry for this request.
    pub(crate) fn label(&self, compiler: CompilerVersion) -> KernelHeader {
        KernelHeader {
            kernel: self.kernel.file.into(),
            instance: self.instance.to_string(),
            architecture: self.architecture.to_string(),
            compiler,
            recipe: self.recipe(&sources::translation_unit(self.kernel.file)),
        }
    }

    pub(crate) fn recipe(&self, unit: &str) -> String {
        let options = self.instance.options(self.architecture).join(" ");
        cached_kernel::hash(&[self.kernel.file.as_bytes(), options.as_bytes(), unit.as_bytes()])
    }

    /// Compiles the instance.
    ///
    /// # Errors
    /// [`CudaError::Compile`].
    pub(crate) fn compile(&self) -> Result<nvrtc::Compiled, CudaError> {
        let unit = sources::translation_unit(self.kernel.file);
        nvrtc::machine_code(self.kernel.file, &unit, &self.instance.options(self.architecture))
    }

    /// Compiles the instance, with the assembler's report in the log.
    ///
    /// # Errors
    /// [`CudaError::Compile`].
    pub(crate) fn compile_reported(&self) -> Result<nvrtc::Compiled, CudaError> {
        let unit = sources::translation_unit(self.kernel.file);
        nvrtc::reported(self.kernel.file, &unit, &self.instance.options(self.architecture))
    }

    /// Loads the machine code from the folders, or compiles and caches it. If a folder compiled ahead of time has the
    /// code, the compiler is not loaded.
    ///
    /// # Errors
    /// [`CudaError::Compile`]; [`CudaError::Unavailable`] if no folder has the code and there is no compiler.
    pub(crate) fn machine_code(&self) -> Result<Vec<u8>, CudaError> {
        self.from(&Folders::of_environment(), nvrtc::version, || Ok(self.compile()?.code))
    }

    pub(crate) fn from(
        &self,
        folders: &Folders,
        compiler: impl FnOnce() -> Option<CompilerVersion>,
        compile: impl FnOnce() -> Result<Vec<u8>, CudaError>,
    ) -> Result<Vec<u8>, CudaError> {
        let unit = sources::translation_unit(self.kernel.file);
        // The architectures whose code runs on this one, best first.
        let architectures = [self.architecture].into_iter().chain(self.architecture.also());
        let served = architectures.filter(|architecture| (self.kernel.serves)(*architecture));
        let recipes: Vec<_> =
            served.map(|architecture| Request { architecture, ..self.clone() }.recipe(&unit)).collect();
        let newest = |folder: &PathBuf| recipes.iter().find_map(|recipe| cache::find(folder, recipe, None));
        if let Some(code) = folders.ahead.iter().find_map(newest) {
            return Ok(code);
        }
        let Some(compiler) = compiler() else {
            return folders.cache.as_ref().and_then(newest).ok_or_else(|| self.nowhere(folders));
        };
        let own = self.recipe(&unit);
        if let Some(code) = folders.cache.as_ref().and_then(|folder| cache::find(folder, &own, Some(compiler))) {
            return Ok(code);
        }
        let code = compile()?;
        if let Some(folder) = &folders.cache {
            let stored = cache::keep(folder, &self.label(compiler), &code);
            stored
                .map(drop)
                .unwrap_or_else(|error| cache::warn(folder, "compiled kernels cannot be stored in", &error));
        }
        Ok(code)
    }

    fn nowhere(&self, folders: &Folders) -> CudaError {
        let folders: Vec<_> =
            folders.ahead.iter().chain(&folders.cache).map(|path| path.display().to_string()).collect();
        let folders = if folders.is_empty() { "no folder at all".into() } else { folders.join(", ") };
        let space = if self.instance.to_string().is_empty() { "" } else { " " };
        CudaError::unavailable(format!(
            "the compiler library libnvrtc cannot be loaded, and {}{space}{} for {} was not found compiled in {folders} \
             (`flash-sampling kernels build` compiles ahead of time)",
            self.kernel.file, self.instance, self.architecture
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::cache::tests::Folder;
    use crate::device::{fused_hopper, fused_portable};

    const NEW: CompilerVersion = CompilerVersion { major: 13, minor: 1 };
    const OLD: CompilerVersion = CompilerVersion { major: 12, minor: 9 };

    fn never() -> Result<Vec<u8>, CudaError> {
        panic!("the compiler ran")
    }

    fn request<'a>(kernel: &'a KernelSource, instance: &'a Instance, architecture: &str) -> Request<'a> {
        Request { kernel, instance, architecture: architecture.parse().unwrap() }
    }

    #[test]
    fn a_host_without_a_compiler_takes_the_newest_file_of_any_folder() {
        let (ahead, cache) = (Folder::new("ahead"), Folder::new("ahead-cache"));
        let instances = (fused_hopper::SOURCE.instances)();
        let hopper = request(&fused_hopper::SOURCE, &instances[0], "sm_90a");
        let folders = Folders { ahead: vec![ahead.0.clone()], cache: Some(cache.0.clone()) };
        let missing = hopper.from(&folders, || None, never).unwrap_err().to_string();
        for part in ["libnvrtc cannot be loaded", "fused_hopper.cu COLUMNS=8", "sm_90a", ahead.0.to_str().unwrap()] {
            assert!(missing.contains(part) && missing.contains(cache.0.to_str().unwrap()), "{missing}");
        }
        cache::keep(&cache.0, &hopper.label(OLD), b"old").unwrap();
        assert_eq!(hopper.from(&folders, || None, never).unwrap(), b"old");
        cache::keep(&cache.0, &hopper.label(NEW), b"new").unwrap();
        assert_eq!(hopper.from(&folders, || None, never).unwrap(), b"new");
        cache::keep(&ahead.0, &hopper.label(OLD), b"ahead").unwrap();
        assert_eq!(hopper.from(&folders, || panic!("the compiler was loaded"), never).unwrap(), b"ahead");
        let other = request(&fused_hopper::SOURCE, &instances[1], "sm_90a");
        assert!(other.from(&folders, || None, never).is_err());
    }

    #[test]
    fn only_files_of_the_same_compiler_are_used() {
        let cache = Folder::new("own");
        let instances = (fused_portable::PLAIN.instances)();
        let plain = request(&fused_portable::PLAIN, &instances[0], "sm_90a");
        let folders = Folders { cache: Some(cache.0.clone()), ..Folders::default() };
        cache::keep(&cache.0, &plain.label(OLD), b"old").unwrap();
        assert_eq!(plain.from(&folders, || Some(NEW), || Ok(b"new".to_vec())).unwrap(), b"new");
        assert_eq!(plain.from(&folders, || Some(NEW), never).unwrap(), b"new");
        assert_eq!(plain.from(&folders, || Some(OLD), never).unwrap(), b"old");
    }

    #[test]
    fn code_for_the_closest_compatible_architecture_is_used() {
        let cache = Folder::new("relative");
        let instances = (fused_portable::PLAIN.instances)();
        let on = |architecture| request(&fused_portable::PLAIN, &instances[0], architecture);
        let folders = Folders { ahead: vec![cache.0.clone()], cache: None };
        cache::keep(&cache.0, &on("sm_80").label(NEW), b"80").unwrap();
        assert_eq!(on("sm_89").from(&folders, || None, never).unwrap(), b"80");
        cache::keep(&cache.0, &on("sm_86").label(OLD), b"86").unwrap();
        assert_eq!(on("sm_89").from(&folders, || None, never).unwrap(), b"86");
        assert_eq!(on("sm_80").from(&folders, || None, never).unwrap(), b"80");
        assert!(on("sm_90a").from(&folders, || None, never).is_err());
        cache::keep(&cache.0, &on("sm_90a").label(NEW), b"90a").unwrap();
        assert!(on("sm_90").from(&folders, || None, never).is_err());
    }

    #[test]
    fn a_cache_that_cannot_be_written_is_no_error() {
        let cache = Folder::new("unwritable");
        let instances = (fused_portable::PLAIN.instances)();
        let plain = request(&fused_portable::PLAIN, &instances[0], "sm_80");
        let file = cache::keep(&cache.0, &plain.label(OLD), b"old").unwrap();
        for cache in [None, Some(file.join("below a file"))] {
            let folders = Folders { cache, ..Folders::default() };
            assert_eq!(plain.from(&folders, || Some(NEW), || Ok(b"new".to_vec())).unwrap(), b"new");
        }
    }
}
