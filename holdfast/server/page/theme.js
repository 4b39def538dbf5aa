// Sets the theme before anything is drawn, and whenever it changes: the user's choice (data-choice), or else the system's.
(() => {
  const root = document.documentElement;
  const dark = matchMedia('(prefers-color-scheme: dark)');
  const apply = () => {
    root.dataset.theme = root.dataset.choice ?? (dark.matches ? 'dark' : 'light');
    document.dispatchEvent(new CustomEvent('themechange'));
  };
  try {
    const chosen = localStorage.getItem('holdfast.theme');
    if (chosen === 'dark' || chosen === 'light') root.dataset.choice = chosen;
  } catch {}
  dark.addEventListener('change', apply);
  document.addEventListener('themechoice', apply);
  apply();
})();
